"""A directory for the child's ``sys.path``: it holds ``djl_python`` under the name users import."""
