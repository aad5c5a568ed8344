"""`kvtool bench attention`: one decode step's attention, provider beside provider."""
