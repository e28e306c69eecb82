"""Groups of Ray actors: placement, dispatch, deadlines."""
