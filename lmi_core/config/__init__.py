"""Configuration: the option table, its sources, and the frozen objects they resolve to."""
