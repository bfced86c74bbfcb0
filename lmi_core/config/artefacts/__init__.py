"""Model artefacts: local directories, the hub, S3, requirements and handlers."""
