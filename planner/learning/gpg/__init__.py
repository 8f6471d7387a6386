"""Training of GPG (TOP, section V-C); what a trained one does is in `stageloom.shared.policy.gpg`."""
