"""What paging costs, measured: kernels and whole-model decode. Loaded by the command that measures."""
