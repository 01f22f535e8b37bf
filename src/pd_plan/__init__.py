"""pd-plan: cuts a profiled model into pipeline stages."""
