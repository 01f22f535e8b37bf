"""The contract of the three programs: file formats, units, the schedule, and a model as a chain of layers."""
