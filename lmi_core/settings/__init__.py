"""The frozen settings that engine, runners, backends and custom code take."""
