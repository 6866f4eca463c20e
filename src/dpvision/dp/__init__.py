"""The mechanism in torch: clipped sums, noise, and the gate that refuses what cannot be clipped record by record."""
