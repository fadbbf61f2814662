"""Stand-ins for what Pallas's interpreter cannot run: inline PTX, and TMA copies by strides."""
