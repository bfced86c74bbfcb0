"""Tests of ``lmi_core.quantize``."""
