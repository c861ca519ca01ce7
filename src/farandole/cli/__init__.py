"""The command `farandole`."""
