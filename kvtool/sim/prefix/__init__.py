"""Prefix caches: vLLM's index of block hashes and SGLang's radix tree, each plainly and fast."""
