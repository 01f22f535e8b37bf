"""pd-profile: measures each layer of a model."""
