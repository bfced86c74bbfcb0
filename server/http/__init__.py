"""HTTP: the application, its connections, admission, streams, logs and metrics."""
