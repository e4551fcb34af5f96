"""The command lines, one file each. They parse first and import what they run then:
`--help` answers at once, and a typo is found before PyTorch is loaded."""
