"""Trainers: the torch backend and the group of ranks as Ray actors."""
