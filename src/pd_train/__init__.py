"""pd-train: trains a model by a plan, one worker process a machine."""
