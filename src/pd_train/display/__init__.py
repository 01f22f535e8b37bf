"""Shows a run to the person who watches it (design, section 7)."""
