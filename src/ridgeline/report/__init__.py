"""Reports as one HTML file: charts in SVG and the page around them, without a script or a link to elsewhere."""
