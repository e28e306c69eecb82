"""The embedded engine: a Hugging Face model behind SGLang's HTTP protocol, on CPU or one GPU."""
