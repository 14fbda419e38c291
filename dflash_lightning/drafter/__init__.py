"""The drafter: configuration, model, block layout, attention, objective, decoding. Knows nothing of Lightning."""
