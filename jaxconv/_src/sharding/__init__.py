"""How a call is split over devices, on every kind of mesh."""
