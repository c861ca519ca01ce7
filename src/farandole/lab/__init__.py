"""The lab: N real hosts with systemd, sshd and an address of their own, on one machine."""
