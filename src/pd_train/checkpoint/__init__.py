"""What a run leaves on disk, so that it can go on: parts of checkpoints, and the trained model."""
