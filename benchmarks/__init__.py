"""Measurements. Each script says what it shows and how to run it, and ends in one line of JSON."""
