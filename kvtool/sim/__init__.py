"""The pool of KV blocks under a scheduler: allocators, the clock, and a plain twin of each fast path."""
