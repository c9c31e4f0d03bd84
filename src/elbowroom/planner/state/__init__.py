"""Plans the model's state beside the activations: which of it is away when, within one budget."""
