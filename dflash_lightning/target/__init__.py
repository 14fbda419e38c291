"""Target models: find and load any Hugging Face causal LM, tap its layers, load its embedding and LM head alone."""
