"""The data sets that `--data` names."""
