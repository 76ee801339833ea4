"""What tests share: small models, ranks to start, reference implementations."""
