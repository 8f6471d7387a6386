"""Training of GPG (TOP, section V-C); what a trained one does is in `shared.policy.gpg`."""
