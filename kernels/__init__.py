"""Triton kernels: a leaf that knows torch and triton and nothing of kvtool."""
