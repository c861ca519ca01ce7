"""The lab: hosts with their own systemd, sshd and address, on one machine."""
