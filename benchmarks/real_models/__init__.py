"""Published models, as their packages hold them: imported, verified, served."""
