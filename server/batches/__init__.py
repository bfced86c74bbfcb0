"""The Batch API: files of requests that are answered when nobody else waits."""
