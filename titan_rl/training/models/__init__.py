"""Models: torchtitan's decoders, made from and published as Hugging Face folders."""
