"""What agreement costs groups larger than a machine can run: costs as measured, groups in virtual time."""
