"""Models and plans that try to get a wrong plan past `validate`, or a right one refused, and a judge that shares no
code with it."""
