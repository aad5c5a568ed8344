"""The CPU backend: fused decode attention in LLVM's own vectors, and the roofs of memory."""
