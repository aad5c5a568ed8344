"""Data only: models, GPUs and the class defaults of transformers. Read by kvtool.catalog."""
