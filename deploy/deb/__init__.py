"""The agent as a Debian package that brings its wheels: `python -m deploy.deb`."""
