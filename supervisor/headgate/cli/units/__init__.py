"""Files of systemd, which `headgate service install` fills in."""
