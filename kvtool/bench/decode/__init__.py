"""`kvtool bench decode`: transformers' models on caches of theirs and of ours."""
