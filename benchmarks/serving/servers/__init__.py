"""Models under other inference servers. Each file runs in its server's environment, without Stageloom."""
