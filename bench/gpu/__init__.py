"""Measurements on a GPU; ``bench/gpu_suite.sh`` runs them all, each module also runs alone."""
