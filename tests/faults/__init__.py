"""Faults at the points where they hurt, and a checker that counts what became of every request (make faults)."""
