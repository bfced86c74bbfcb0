"""One function per op, called by model code on handles while a step graph is recorded."""
