"""The scheduler where blocks are told apart: prefix caching, priorities, asynchronous scheduling."""
