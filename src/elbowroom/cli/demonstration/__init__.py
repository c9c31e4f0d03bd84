"""The demo: real models trained plainly and then within a budget, each in a process of its own."""
