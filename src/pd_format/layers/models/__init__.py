"""The project's own models, which pd-profile knows by name."""
