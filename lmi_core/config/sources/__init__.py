"""Where configuration is written: command line, environment, properties; merged by precedence."""
