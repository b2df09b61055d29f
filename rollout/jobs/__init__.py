"""The jobs behind the commands: run, calibrate, verify, bench, report."""
