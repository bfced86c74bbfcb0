"""Random mutations of configurations with a fixed seed; ``make fuzz`` runs many more."""

from .fuzz import fuzz


def test_no_mutation_ends_in_a_traceback():
    assert fuzz(seconds=0, seed=1, at_least=1500) == 1500
